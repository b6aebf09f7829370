# SPDX-License-Identifier: Apache-2.0

"""Let the benchmarks of papers import the modules beside their folder."""

import os
import sys

sys.path.append(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
