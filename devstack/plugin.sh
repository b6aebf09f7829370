#!/bin/bash
#
# SPDX-License-Identifier: Apache-2.0
#
# Has DevStack's Glance keep its images in a store of the type dedup, and runs
# dedupd beside it; and, on a compute host, another one as the cache that Nova
# fetches images through. stack.sh sources this file in each phase; the phases
# are at the end. On a host with neither nothing is done.

# shellcheck disable=SC2154

_XTRACE_GLANCE_DEDUP=$(set +o | grep xtrace)
set +o xtrace

# Succeeds if images of the last run lie there: is_dedup_repository DIRECTORY
function is_dedup_repository {
    sudo grep -qs '"kind": *"glance-dedup repository"' "$1/repository.json"
}

# It will be emptied: check_dedup_directory NAME DIRECTORY
function check_dedup_directory {
    if [[ ! $2 =~ ^/[^[:space:]]+$ ]]; then
        die $LINENO "$1=$2 must be an absolute path without spaces."
    fi
    if ! is_dedup_repository "$2" && sudo test -e "$2" && \
        [[ -n $(sudo ls -A "$2") ]]; then
        die $LINENO "$1=$2 is neither empty nor a repository of" \
            "glance-dedup, and would be emptied. Name another directory, or" \
            "remove what is in it."
    fi
}

# Before anything is installed: a wrong setting costs a minute then, not an hour.
function check_dedup_settings {
    if ! is_plugin_enabled glance-dedup; then
        die $LINENO "The plugin must be enabled by the name glance-dedup," \
            "by which DevStack finds the packages that it needs. Correct" \
            "enable_plugin in local.conf."
    fi
    if is_service_enabled g-api; then
        check_dedup_store_settings
    fi
    if is_service_enabled dedup-cache; then
        check_dedup_cache_settings
    fi
}

function check_dedup_store_settings {
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
    check_dedup_directory DEDUP_DATA_DIR "$DEDUP_DATA_DIR"
}

function check_dedup_cache_settings {
    check_dedup_directory DEDUP_CACHE_DATA_DIR "$DEDUP_CACHE_DATA_DIR"
    if [[ $DEDUP_CACHE_DATA_DIR == "$DEDUP_DATA_DIR" ]]; then
        die $LINENO "DEDUP_CACHE_DATA_DIR=$DEDUP_CACHE_DATA_DIR is the" \
            "directory of the store. Name another one: a cache deletes what" \
            "it holds."
    fi
    if [[ ! $DEDUP_CACHE_LIMIT_MIB =~ ^[0-9]+$ ]]; then
        die $LINENO "DEDUP_CACHE_LIMIT_MIB=$DEDUP_CACHE_LIMIT_MIB is not a" \
            "number of MiB. Use 0 for no limit."
    fi
    if [[ ! $DEDUP_CACHE_UPSTREAM_URL =~ ^https://[^/[:space:]]+$ ]]; then
        die $LINENO "DEDUP_CACHE_UPSTREAM_URL=$DEDUP_CACHE_UPSTREAM_URL is not like" \
            "https://HOST:PORT, where the dedupd beside Glance listens."
    fi
    if [[ ! -r $DEDUP_CACHE_UPSTREAM_CA ]] && ! is_service_enabled dedupd; then
        die $LINENO "DEDUP_CACHE_UPSTREAM_CA=$DEDUP_CACHE_UPSTREAM_CA is not there." \
            "Copy that file from the host of $DEDUP_CACHE_UPSTREAM_URL."
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
    # With GLANCE_ENABLE_MULTIPLE_STORES=False, DevStack has not done it, but
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

    # Apache cuts uploads into small chunks. Clients of uWSGI's own port
    # send larger ones than the 1 MiB that it takes by default.
    iniset "$GLANCE_UWSGI_CONF" uwsgi chunked-input-limit 16777216
}

# Any local user may make directories in /dev/shm, which is empty after a
# reboot. So systemd makes that of the fingerprint filters, before anybody
# else can. Glance needs it without dedupd, too.
function create_dedup_filter_directory {
    echo "d $DEDUP_FILTER_DIR 0700 $STACK_USER $(id -gn "$STACK_USER")" |
        sudo tee "$DEDUP_FILTER_TMPFILES"
    sudo systemd-tmpfiles --create "$DEDUP_FILTER_TMPFILES"
}

# Written again each time, so that nothing of a former run stays:
# begin_dedupd_conf FILE DATA_DIR SOCKET
function begin_dedupd_conf {
    sudo install -d -o "$STACK_USER" "$(dirname "$1")"
    rm -f "$1"
    iniset "$1" DEFAULT debug "$ENABLE_DEBUG_LOG_LEVEL"
    setup_logging "$1"
    iniset "$1" dedupd datadir "$2"
    iniset "$1" dedupd socket "$3"

    # /run is empty after a reboot.
    echo "d $(dirname "$3") 0755 $STACK_USER root" |
        sudo tee /etc/tmpfiles.d/dedupd.conf
    sudo systemd-tmpfiles --create /etc/tmpfiles.d/dedupd.conf
}

# The servers that check tokens, and to which requests are passed on.
function configure_dedupd_glance {
    iniset "$1" dedupd glance_url "$GLANCE_URL"
    if is_service_enabled tls-proxy; then
        iniset "$1" dedupd glance_ca "$SSL_BUNDLE_FILE"
    fi
}

function configure_dedupd {
    begin_dedupd_conf "$DEDUPD_CONF" "$DEDUP_DATA_DIR" "$DEDUPD_SOCKET"
    iniset "$DEDUPD_CONF" dedupd status_listen 127.0.0.1:9394
    iniset_rpc_backend dedupd "$DEDUPD_CONF"
    if ini_has_option "$DEDUPD_CONF" DEFAULT transport_url; then
        iniset "$DEDUPD_CONF" dedupd glance_notifications True
    fi
    if [[ -n $DEDUP_LISTEN ]]; then
        make_dedupd_certificate
        iniset "$DEDUPD_CONF" dedupd listen "$DEDUP_LISTEN"
        iniset "$DEDUPD_CONF" dedupd tls_cert "$DEDUPD_CERT"
        iniset "$DEDUPD_CONF" dedupd tls_key "$DEDUPD_KEY"
        configure_dedupd_glance "$DEDUPD_CONF"
    fi
}

# Its own authority. It stays, since other hosts have a copy of it.
function make_dedupd_certificate {
    local name=DNS:$SERVICE_HOST
    if [[ $SERVICE_HOST =~ ^[0-9.]+$ || $SERVICE_HOST == *:* ]]; then
        name=IP:${SERVICE_HOST//[\[\]]/}
    fi
    if [[ ! -e $DEDUPD_CERT ]]; then
        (umask 077 && openssl req -x509 -newkey rsa:2048 -nodes -days 3650 \
            -subj "/CN=dedupd of DevStack" -addext "subjectAltName=$name" \
            -keyout "$DEDUPD_KEY" -out "$DEDUPD_CERT")
    fi
}

# Nova's requests for Glance go to the relay, which passes them to the cache.
function configure_dedup_cache {
    begin_dedupd_conf "$DEDUP_CACHE_CONF" "$DEDUP_CACHE_DATA_DIR" \
        "$DEDUP_CACHE_SOCKET"
    iniset "$DEDUP_CACHE_CONF" DEFAULT mode cache
    configure_dedupd_glance "$DEDUP_CACHE_CONF"
    iniset "$DEDUP_CACHE_CONF" cache listen "$DEDUP_CACHE_LISTEN"
    iniset "$DEDUP_CACHE_CONF" cache relay_listen "$DEDUP_RELAY_LISTEN"
    iniset "$DEDUP_CACHE_CONF" cache upstream_url "$DEDUP_CACHE_UPSTREAM_URL"
    iniset "$DEDUP_CACHE_CONF" cache upstream_ca "$DEDUP_CACHE_UPSTREAM_CA"
    iniset "$DEDUP_CACHE_CONF" cache limit_mib "$DEDUP_CACHE_LIMIT_MIB"
    iniset "$NOVA_CONF" glance endpoint_override "http://$DEDUP_RELAY_LISTEN"
}

# Nothing but the directory itself is left, which may be a mount point:
# empty_dedup_repository DIRECTORY
function empty_dedup_repository {
    local id
    if ! is_dedup_repository "$1"; then
        return 0
    fi
    id=$(sudo sed -n 's/.*"repository_id": *"\([0-9a-f]*\)".*/\1/p' \
        "$1/repository.json")
    sudo find "$1" -mindepth 1 -delete
    sudo rm -f "$DEDUP_FILTER_DIR/$id.filter"
}

# An empty directory, in which Glance creates a repository when it starts. The
# images of a former run are in no database any more where DevStack has made a
# new one for Glance; elsewhere the repository is another host's, too.
function init_dedup_store {
    # shellcheck disable=SC2086
    if is_service_enabled $DATABASE_BACKENDS; then
        empty_dedup_repository "$DEDUP_DATA_DIR"
    fi
    sudo install -d -o "$STACK_USER" "$DEDUP_DATA_DIR"
}

# A cache has a repository of its own, and begins empty.
function init_dedup_cache {
    empty_dedup_repository "$DEDUP_CACHE_DATA_DIR"
    sudo install -d -o "$STACK_USER" "$DEDUP_CACHE_DATA_DIR"
    "$GLANCE_BIN_DIR/glance-dedup" --repository "$DEDUP_CACHE_DATA_DIR" \
        repository create
}

# start_dedupd SERVICE FILE SOCKET
function start_dedupd {
    run_process "$1" "$GLANCE_BIN_DIR/dedupd --config-file $2"
    test_with_retry "curl -sf -o /dev/null --unix-socket $3 \
        http://localhost/healthcheck/ready" \
        "$1 did not start: see journalctl --unit devstack@$1" \
        "$SERVICE_TIMEOUT"
}

function start_dedup_relay {
    run_process dedup-relay \
        "$GLANCE_BIN_DIR/dedupd-relay --config-file $DEDUP_CACHE_CONF"
    test_with_retry "curl -s -o /dev/null http://$DEDUP_RELAY_LISTEN/" \
        "dedup-relay did not start: see journalctl --unit devstack@dedup-relay" \
        "$SERVICE_TIMEOUT"
}

function stop_dedupd {
    stop_process dedup-relay
    stop_process dedupd
    stop_process dedup-cache
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
            "sudo $GLANCE_BIN_DIR/glance-dedup task collect"
    fi
}

# Files of others stay: no directory is removed that is not empty.
function cleanup_glance_dedup {
    empty_dedup_repository "$DEDUP_DATA_DIR"
    empty_dedup_repository "$DEDUP_CACHE_DATA_DIR"
    sudo rmdir "$DEDUP_DATA_DIR" "$DEDUP_CACHE_DATA_DIR" \
        "$DEDUP_FILTER_DIR" 2>/dev/null || true
    sudo rm -rf "$(dirname "$DEDUPD_CONF")" "$(dirname "$DEDUPD_SOCKET")" \
        /etc/tmpfiles.d/dedupd.conf "$DEDUP_FILTER_TMPFILES"
    if [[ -L /usr/local/bin/glance-dedup ]]; then
        sudo rm -f /usr/local/bin/glance-dedup
    fi
}

if [[ $1 == stack ]] && is_service_enabled g-api dedup-cache; then
    case $2 in
        pre-install)
            check_dedup_settings
            ;;
        install)
            echo_summary "Installing glance-dedup"
            install_glance_dedup
            ;;
        post-config)
            stop_dedupd
            create_dedup_filter_directory
            if is_service_enabled g-api; then
                echo_summary "Configuring Glance's store $DEDUP_STORE_NAME"
                init_dedup_store
                enable_dedup_store
                configure_dedup_store
            fi
            if is_service_enabled dedupd; then
                configure_dedupd
            fi
            if is_service_enabled dedup-cache; then
                echo_summary "Configuring the cache of images for Nova"
                init_dedup_cache
                configure_dedup_cache
            fi
            ;;
        extra)
            # Glance runs by now, and has created the store's repository.
            if is_service_enabled dedupd; then
                echo_summary "Starting dedupd"
                start_dedupd dedupd "$DEDUPD_CONF" "$DEDUPD_SOCKET"
            fi
            if is_service_enabled dedup-cache; then
                echo_summary "Starting the cache of images for Nova"
                start_dedupd dedup-cache "$DEDUP_CACHE_CONF" \
                    "$DEDUP_CACHE_SOCKET"
                start_dedup_relay
            fi
            ;;
        test-config)
            if is_service_enabled tempest && is_service_enabled g-api; then
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
