# SPDX-License-Identifier: Apache-2.0

"""The options of the daemon, by what they are for."""
