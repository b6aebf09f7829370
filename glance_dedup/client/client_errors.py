# SPDX-License-Identifier: Apache-2.0

"""Errors of requests to a daemon, or to another server of NBD."""


class ClientError(Exception):
    """Base of all exceptions that the client raises on purpose."""


class DaemonUnavailable(ClientError):
    """Nobody answers, or not in time, or the connection broke."""


class BadAnswer(ClientError):
    """The answer is not one that a daemon sends."""


class Refused(ClientError):
    """The daemon answered with an error.

    :ivar code: the HTTP status
    :ivar repository_id: the daemon's repository; '': not in the answer
    """

    def __init__(self, code: int, message: str, repository_id: str = ''):
        super().__init__(message)
        self.code = code
        self.repository_id = repository_id
