# SPDX-License-Identifier: Apache-2.0

"""Damage gives the right bytes, or an error that names the file.

Four tables make the cases, and a new structure, damage or task is one more row
in one of them:

``template.py``
    builds a small repository that has one of each thing a repository can have;
    ``STRUCTURES`` there names the kinds of files, and how to find them.
``damages.py``
    ``DAMAGES``: damages to a file or directory; each can be undone.
``operations.py``
    ``OPERATIONS``: all operations that read or change a repository.
``oracle.py``
    the images that a damaged byte may cost, by the format alone.

``server.py`` runs a case in a process of its own: damage, operation, reading,
undo, reading, maintenance, reading. All three read the same: an image whose
own bytes were not hit is right at any time, and after the undo so is every
image that was not deleted, since no task may destroy data that the damage only
hid.
"""
