# Licensed under the Apache License, Version 2.0 (the "License"); you may
# not use this file except in compliance with the License. You may obtain
# a copy of the License at
#
#      http://www.apache.org/licenses/LICENSE-2.0
#
# Unless required by applicable law or agreed to in writing, software
# distributed under the License is distributed on an "AS IS" BASIS, WITHOUT
# WARRANTIES OR CONDITIONS OF ANY KIND, either express or implied. See the
# License for the specific language governing permissions and limitations
# under the License.
"""dedupd, the sidecar daemon of glance_dedup, and the maintainer's tasks.

The daemon (``main.py``) serves reads, to the driver over a Unix socket and to
other hosts over TLS, and answers operators by HTTP, RPC, metrics and a page.
Its scheduler runs the tasks (``tasks.py``): accounting, collection, merging
and scrubbing, each a module with a ``run_once``; the command line runs the
same where no daemon does. glance_dedup never needs it to store an image or to
read one.
"""
