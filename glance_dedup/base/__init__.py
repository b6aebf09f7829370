# SPDX-License-Identifier: Apache-2.0

"""What every part of the project stands on; it uses nothing else of ours."""
