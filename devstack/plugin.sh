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
# Has DevStack's Glance keep its images in a store of the type dedup, and runs
# dedupd beside it. stack.sh sources this file in each phase; what a phase does
# stands at the end. On a host without Glance's API nothing is done.

# shellcheck disable=SC2154

_XTRACE_GLANCE_DEDUP=$(set +o | grep xtrace)
set +o xtrace

# Whether the images of the last run lie there.
function is_dedup_repository {
    sudo grep -qs '"kind": *"glance-dedup repository"' \
        "$DEDUP_DATA_DIR/repository.json"
}

# Before anything is installed: what is wrong costs a minute then, not an hour.
function check_dedup_settings {
    if ! is_plugin_enabled glance-dedup; then
        die $LINENO "The plugin must be enabled by the name glance-dedup," \
            "by which DevStack finds the packages that it needs. Correct" \
            "enable_plugin in local.conf."
    fi
    if [[ ! $DEDUP_STORE_NAME =~ ^[A-Za-z0-9_-]+$ || \
        $DEDUP_STORE_NAME == os_glance_* ]]; then
        die $LINENO "DEDUP_STORE_NAME=$DEDUP_STORE_NAME cannot be a store's" \
            "name. Use letters, digits, _ and -, and do not begin with" \
            "os_glance_, which Glance keeps for itself."
    fi
    if [[ ! $DEDUP_CODEC =~ ^(none|lz4|zstd)$ ]]; then
        die $LINENO "DEDUP_CODEC=$DEDUP_CODEC is unknown. Use none, lz4 or" \
            "zstd."
    fi
    if [[ ! $DEDUP_DATA_DIR =~ ^/[^[:space:]]+$ ]]; then
        die $LINENO "DEDUP_DATA_DIR=$DEDUP_DATA_DIR must be an absolute path" \
            "without spaces."
    fi
    if ! is_dedup_repository && sudo test -e "$DEDUP_DATA_DIR" && \
        [[ -n $(sudo ls -A "$DEDUP_DATA_DIR") ]]; then
        die $LINENO "DEDUP_DATA_DIR=$DEDUP_DATA_DIR is neither empty nor a" \
            "repository of glance-dedup, and would be emptied. Name another" \
            "directory, or remove what is in it."
    fi
}

# Into the environment that Glance runs in.
function install_glance_dedup {
    PIP_VIRTUAL_ENV=${PROJECT_VENV["glance"]:-} setup_develop \
        "$GLANCE_DEDUP_DIR"
    if [[ $GLANCE_BIN_DIR != /usr/local/bin ]]; then
        sudo ln -sf "$GLANCE_BIN_DIR/glance-dedup" /usr/local/bin/
    fi
}

# Add the store to those that DevStack or another plugin has configured.
function enable_dedup_store {
    local configured backend name backends=""
    configured=$(iniget "$GLANCE_API_CONF" DEFAULT enabled_backends)
    for backend in ${configured//,/ }; do
        name=${backend%%:*}
        # The file may be that of a former run, with our store of then.
        if [[ $backend == *:dedup ]]; then
            continue
        fi
        if [[ $name == "$DEDUP_STORE_NAME" ]]; then
            die $LINENO "DEDUP_STORE_NAME=$name is the name of another" \
                "store, $backend. Choose another name."
        fi
        # DevStack names file stores, but gives them no directory.
        if [[ $backend == *:file ]] && ! ini_has_option "$GLANCE_API_CONF" \
            "$name" filesystem_store_datadir; then
            iniset "$GLANCE_API_CONF" "$name" filesystem_store_datadir \
                "$GLANCE_MULTISTORE_FILE_IMAGE_DIR/$name/"
        fi
        backends+="$backend,"
    done
    iniset "$GLANCE_API_CONF" DEFAULT enabled_backends \
        "$backends$DEDUP_STORE_NAME:dedup"
    iniset "$GLANCE_API_CONF" glance_store default_backend "$DEDUP_STORE_NAME"
    # Where GLANCE_ENABLE_MULTIPLE_STORES=False, DevStack has not done it, but
    # with enabled_backends Glance needs these.
    if [[ $GLANCE_ENABLE_MULTIPLE_STORES == False ]]; then
        configure_reserved_stores
    fi
}

function configure_dedup_store {
    local socket=$DEDUPD_SOCKET
    if ! is_service_enabled dedupd; then
        # Read directly.
        socket=""
    fi
    iniset "$GLANCE_API_CONF" "$DEDUP_STORE_NAME" dedup_store_datadir \
        "$DEDUP_DATA_DIR"
    iniset "$GLANCE_API_CONF" "$DEDUP_STORE_NAME" dedup_store_codec \
        "$DEDUP_CODEC"
    iniset "$GLANCE_API_CONF" "$DEDUP_STORE_NAME" dedup_store_dedupd_socket \
        "$socket"

    # Apache cuts uploads into small chunks. Who speaks to uWSGI's own port
    # sends larger ones than the 1 MiB that it takes by default.
    iniset "$GLANCE_UWSGI_CONF" uwsgi chunked-input-limit 16777216
}

# Written anew each time, so that nothing of a former run stays.
function configure_dedupd {
    sudo install -d -o "$STACK_USER" "$(dirname "$DEDUPD_CONF")"
    rm -f "$DEDUPD_CONF"
    iniset "$DEDUPD_CONF" DEFAULT debug "$ENABLE_DEBUG_LOG_LEVEL"
    setup_logging "$DEDUPD_CONF"
    iniset "$DEDUPD_CONF" dedupd datadir "$DEDUP_DATA_DIR"
    iniset "$DEDUPD_CONF" dedupd socket "$DEDUPD_SOCKET"
    iniset "$DEDUPD_CONF" dedupd status_listen 127.0.0.1:9394
    iniset_rpc_backend dedupd "$DEDUPD_CONF"
    if ini_has_option "$DEDUPD_CONF" DEFAULT transport_url; then
        iniset "$DEDUPD_CONF" dedupd glance_notifications True
    fi

    # /run is empty after a reboot.
    echo "d $(dirname "$DEDUPD_SOCKET") 0755 $STACK_USER root" |
        sudo tee /etc/tmpfiles.d/dedupd.conf
    sudo systemd-tmpfiles --create /etc/tmpfiles.d/dedupd.conf
}

# Nothing but the directory itself is left, which may be a mount point.
function empty_dedup_repository {
    local id
    if ! is_dedup_repository; then
        return 0
    fi
    id=$(sudo sed -n 's/.*"repository_id": *"\([0-9a-f]*\)".*/\1/p' \
        "$DEDUP_DATA_DIR/repository.json")
    sudo find "$DEDUP_DATA_DIR" -mindepth 1 -delete
    sudo rm -f "/dev/shm/glance-dedup-$(id -u "$STACK_USER")/$id.filter"
}

# An empty directory, in which Glance creates a repository when it starts. The
# images of a former run are in no database any more where DevStack has made
# Glance's anew; elsewhere the repository is another host's, too.
function init_dedup_store {
    # shellcheck disable=SC2086
    if is_service_enabled $DATABASE_BACKENDS; then
        empty_dedup_repository
    fi
    sudo install -d -o "$STACK_USER" "$DEDUP_DATA_DIR"
}

# Glance runs by now, and has created the repository.
function start_dedupd {
    run_process dedupd "$GLANCE_BIN_DIR/dedupd --config-file $DEDUPD_CONF"
    test_with_retry "curl -sf -o /dev/null --unix-socket $DEDUPD_SOCKET \
        http://localhost/healthcheck/ready" \
        "dedupd did not start: see journalctl --unit devstack@dedupd" \
        "$SERVICE_TIMEOUT"
}

function stop_dedupd {
    stop_process dedupd
}

# The tests themselves are in TEMPEST_PLUGINS.
function configure_dedup_tempest {
    local unit=devstack@dedupd.service
    iniset "$TEMPEST_CONFIG" dedup store "$DEDUP_STORE_NAME"
    if is_service_enabled dedupd; then
        iniset "$TEMPEST_CONFIG" dedup daemon_url \
            "http://$(iniget "$DEDUPD_CONF" dedupd status_listen)"
        iniset "$TEMPEST_CONFIG" dedup daemon_stop_command \
            "$SYSTEMCTL stop $unit"
        iniset "$TEMPEST_CONFIG" dedup daemon_start_command \
            "$SYSTEMCTL start $unit"
        iniset "$TEMPEST_CONFIG" dedup collect_command \
            "sudo $GLANCE_BIN_DIR/glance-dedup collect"
    fi
}

# What is not ours stays: no directory is removed that is not empty.
function cleanup_glance_dedup {
    empty_dedup_repository
    sudo rmdir "$DEDUP_DATA_DIR" \
        "/dev/shm/glance-dedup-$(id -u "$STACK_USER")" 2>/dev/null || true
    sudo rm -rf "$(dirname "$DEDUPD_CONF")" "$(dirname "$DEDUPD_SOCKET")" \
        /etc/tmpfiles.d/dedupd.conf
    if [[ -L /usr/local/bin/glance-dedup ]]; then
        sudo rm -f /usr/local/bin/glance-dedup
    fi
}

if [[ $1 == stack ]] && is_service_enabled g-api; then
    case $2 in
        pre-install)
            check_dedup_settings
            ;;
        install)
            echo_summary "Installing glance-dedup"
            install_glance_dedup
            ;;
        post-config)
            echo_summary "Configuring Glance's store $DEDUP_STORE_NAME"
            stop_dedupd
            init_dedup_store
            enable_dedup_store
            configure_dedup_store
            if is_service_enabled dedupd; then
                configure_dedupd
            fi
            ;;
        extra)
            if is_service_enabled dedupd; then
                echo_summary "Starting dedupd"
                start_dedupd
            fi
            ;;
        test-config)
            if is_service_enabled tempest; then
                configure_dedup_tempest
            fi
            ;;
    esac
elif [[ $1 == unstack ]]; then
    stop_dedupd
elif [[ $1 == clean ]]; then
    cleanup_glance_dedup
fi

$_XTRACE_GLANCE_DEDUP
