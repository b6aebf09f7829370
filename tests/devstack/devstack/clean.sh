#!/bin/bash
#
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
#
# Removes what stack.sh made, but not what it installed.

# shellcheck disable=SC1091,SC2154

source "$(dirname "$0")/common"

"$HERE/unstack.sh"
run_phase clean
cleanup_glance
sudo rm -rf "$GLANCE_CONF_DIR" "$(dirname "$NOVA_CONF")"
sudo find "$SYSTEMD_DIR" -type f -name '*devstack@*service' -delete
$SYSTEMCTL daemon-reload
echo "clean.sh completed"
