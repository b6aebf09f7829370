# SPDX-License-Identifier: Apache-2.0

"""Whatever is damaged: the right bytes, or an error that names it.

Four tables make the cases, and a new structure, damage or task is one more row
in one of them:

``template.py``
    builds a small repository that has one of each thing a repository can have;
    ``STRUCTURES`` there names the kinds of files, and how to find them.
``damages.py``
    ``DAMAGES``: what can become of a file or directory; each can be undone.
``operations.py``
    ``OPERATIONS``: whatever reads or changes a repository.
``oracle.py``
    which images a damaged byte may cost, told by the format alone.

``server.py`` runs a case in a process of its own: damage, operation, look,
undo, look again, maintain, look again. The three looks are the same: an image
whose own bytes were not hit is read rightly at any time, and after the damage
was undone so is every one that was not deleted, since no task may have
destroyed what the damage only hid.
"""
