# SPDX-License-Identifier: Apache-2.0

"""The daemon's services: bytes of images, replicas, disks."""
