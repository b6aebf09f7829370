# SPDX-License-Identifier: Apache-2.0

"""What hosts that share a directory can do there together, tried."""
