# SPDX-License-Identifier: Apache-2.0

"""The scheduler of the tasks, its queue and its conditions."""
