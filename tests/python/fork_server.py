"""Runs the command line in forks of one process of it that has loaded LibTorch (tests/testing/fork_server.cpp).

A start of its own costs a quarter of a second, a fork 20 ms, and the tests need about a thousand.
"""

import contextlib
import os
import signal
import socket
import struct
import subprocess
import tempfile


class ForkServer:
    def __init__(self, library, binary, environment):
        self.binary = str(binary)
        self.socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        variables = {"LD_PRELOAD": str(library), "FORK_SERVER_SOCKET": str(theirs.fileno())}
        with theirs:
            # It ends with this process, whose end of the socket is closed then.
            self.process = subprocess.Popen([self.binary], env={**environment, **variables}, pass_fds=[theirs.fileno()])

    def run(self, arguments, cwd, input, timeout):
        """As subprocess.run with capture_output."""
        with contextlib.ExitStack() as stack:
            stdin, stdout, stderr = (stack.enter_context(tempfile.TemporaryFile()) for _ in range(3))
            ours, theirs = (stack.enter_context(end) for end in socket.socketpair())
            if input:
                stdin.write(input)
                stdin.seek(0)
            request = b"".join(os.fsencode(part) + b"\0" for part in (cwd or os.getcwd(), *arguments))
            socket.send_fds(self.socket, [request], [end.fileno() for end in (theirs, stdin, stdout, stderr)])
            theirs.close()
            process = self._number(ours)
            ours.settimeout(timeout)
            try:
                status = os.waitstatus_to_exitcode(self._number(ours))
            except TimeoutError:
                os.kill(process, signal.SIGKILL)
                raise subprocess.TimeoutExpired([self.binary, *arguments], timeout) from None
            stdout.seek(0)
            stderr.seek(0)
            return subprocess.CompletedProcess([self.binary, *arguments], status, stdout.read(), stderr.read())

    def _number(self, end):
        data = end.recv(4)
        assert len(data) == 4, "the fork server has ended"
        return struct.unpack("i", data)[0]
