# SPDX-License-Identifier: Apache-2.0
"""A file with the cloud of a Glance that needs no Keystone."""

import json
import pathlib

#: The cloud's name in the file.
NAME = 'ops'


def write(directory, url):
    """Write the file; return its path, for OS_CLIENT_CONFIG_FILE.

    :param url: the glance-api's
    """
    path = pathlib.Path(directory) / 'clouds.yaml'
    path.write_text(json.dumps({'clouds': {NAME: {
        'auth_type': 'admin_token',
        'auth': {'endpoint': f'{url}/v2', 'token': 'ops'}}}}))
    return str(path)
