"""``python -m tests.pythons``: installs the package on other Pythons and runs checks there.

A Python comes from the PATH, or from Debian: the suite that has it is installed with debootstrap
into a folder, and the checks run inside it with chroot.

Rules
1. Everything is mounted in a mount namespace of its own (unshare), which ends with the process that
   works in it. So no mount is ever left behind, not even by ``kill -9``.
2. The source is mounted read-only. What a check writes goes into the chroot's own ``/tmp``.
3. Packages come from where this machine's own apt and pip get them: the mirror, index and
   certificates are those of their configuration, read at run time.
4. A folder that is made half is made again: it gets its name when it is complete.
5. What cannot be tried here is told in one line, with what to install. That is no failure; a check
   that fails is.
"""
