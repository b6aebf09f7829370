#!/bin/bash
#
# SPDX-License-Identifier: Apache-2.0
#
# Stops the services that stack.sh started.

# shellcheck disable=SC1091

source "$(dirname "$0")/common"

run_phase unstack
stop_glance
echo "unstack.sh completed"
