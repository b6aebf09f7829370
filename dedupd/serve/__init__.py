# SPDX-License-Identifier: Apache-2.0

"""What the daemon serves: bytes of images, replicas, disks."""
