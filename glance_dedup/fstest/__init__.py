# SPDX-License-Identifier: Apache-2.0

"""The trial of a shared directory: its properties on several hosts."""
