# SPDX-License-Identifier: Apache-2.0
"""dedupd, the sidecar daemon of glance_dedup, and the maintainer's tasks.

The daemon (``daemon.py``) serves reads, to the driver over a Unix socket and
to other hosts over TLS, and answers operators by HTTP, RPC, metrics and a
page. Its scheduler runs the tasks (``tasks/``): accounting, collection,
merging and scrubbing, each a module with a ``run_once``; the command line runs
the same where no daemon runs. glance_dedup never needs it to store an image or
to read one.
"""
