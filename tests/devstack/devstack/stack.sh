#!/bin/bash
#
# SPDX-License-Identifier: Apache-2.0
#
# Installs and starts the services of local.conf; the plugins' phases have
# DevStack's order: stack.sh [LAST_PHASE]

# shellcheck disable=SC1091,SC2154

set -o errexit
source "$(dirname "$0")/common"

function phase {
    echo "=== $1"
    run_phase stack "$1"
    if [[ $1 == "$last" ]]; then
        echo "stack.sh completed $last"
        exit 0
    fi
}

last=${1:-test-config}
# shellcheck disable=SC2046
install_package $(get_plugin_packages)
phase pre-install

if is_service_enabled g-api; then
    configure_glance
    # Keystone is not there.
    iniset "$GLANCE_API_CONF" paste_deploy flavor ""
    iniset "$GLANCE_API_CONF" oslo_policy policy_file "$HERE/policy.yaml"
fi
if is_service_enabled n-cpu; then
    sudo install -d -o "$STACK_USER" "$(dirname "$NOVA_CONF")"
    rm -f "$NOVA_CONF"
fi
phase install

# shellcheck disable=SC2086
if is_service_enabled $DATABASE_BACKENDS && is_service_enabled g-api; then
    init_glance
fi
phase post-config
merge_config_group "$HERE/local.conf" post-config

if is_service_enabled g-api; then
    start_glance
fi
phase extra

if is_service_enabled tempest; then
    install -d "$(dirname "$TEMPEST_CONFIG")"
    rm -f "$TEMPEST_CONFIG"
    iniset "$TEMPEST_CONFIG" service_available glance True
    echo "TEMPEST_PLUGINS=$TEMPEST_PLUGINS"
fi
phase test-config
