# SPDX-License-Identifier: Apache-2.0

"""Middleware for a Glance of tests: a file has the tokens and their users.

It replaces Keystone's middleware. The file has a line for each token: the
token, the project, the roles. It is read at each request, so that a token can
expire at any time.
"""


def factory(global_conf, tokens, **others):
    """Make the filter, for paste."""
    def make(app):
        def serve(environ, start_response):
            for name in ('USER_ID', 'PROJECT_ID', 'TENANT_ID', 'ROLES',
                         'IDENTITY_STATUS'):
                environ.pop(f'HTTP_X_{name}', None)
            given = environ.get('HTTP_X_AUTH_TOKEN')
            with open(tokens) as lines:
                known = {line.split()[0]: line.split()[1:] for line in lines}
            if given not in known:
                body = b'This server could not verify that you are authorized'
                start_response('401 Unauthorized', [
                    ('Content-Type', 'text/plain'),
                    ('Content-Length', str(len(body))),
                    ('WWW-Authenticate', 'Keystone uri="http://keystone/v3"')])
                return [body]
            project, roles = known[given]
            environ.update({
                'HTTP_X_IDENTITY_STATUS': 'Confirmed', 'HTTP_X_ROLES': roles,
                'HTTP_X_USER_ID': project, 'HTTP_X_PROJECT_ID': project,
                'HTTP_X_TENANT_ID': project})
            return app(environ, start_response)
        return serve
    return make
