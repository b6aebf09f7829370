# SPDX-License-Identifier: Apache-2.0

"""Lets the benchmarks of papers import what is beside their folder."""

import os
import sys

sys.path.append(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
