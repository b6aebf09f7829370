#!/bin/bash
#
# SPDX-License-Identifier: Apache-2.0
#
# Removes the files that stack.sh made, but not the programs that it installed.

# shellcheck disable=SC1091,SC2154

source "$(dirname "$0")/common"

"$HERE/unstack.sh"
run_phase clean
cleanup_glance
sudo rm -rf "$GLANCE_CONF_DIR" "$(dirname "$NOVA_CONF")"
sudo find "$SYSTEMD_DIR" -type f -name '*devstack@*service' -delete
$SYSTEMCTL daemon-reload
echo "clean.sh completed"
