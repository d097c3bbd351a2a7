"""The end of a program: what runs is stopped first, and nothing begins any more."""

import subprocess
import sys

import pytest

PROGRAMS = {
    "threads are joined": (
        (
            "import time\n"
            "thread = at_exit.OwnThread('own', lambda: (time.sleep(0.2), print('done', flush=True)))\n"
            "thread.start()"
        ),
        "done\n",
    ),
    "executors still work": (
        (
            "from concurrent.futures import Future, ThreadPoolExecutor\n"
            "pool, done = ThreadPoolExecutor(1), Future()\n"
            "at_exit.stop_at_exit(done, lambda: done.set_result(pool.submit(print, 'stopped').result()), pool)"
        ),
        "stopped\n",
    ),
    "nothing begins any more": (
        (
            "import threading\n"
            "from concurrent.futures import Future\n"
            "from edgeasync.errors import EdgeAsyncError\n"
            "def begin():\n"
            "    threading.main_thread().join()\n"
            "    try: at_exit.stop_at_exit(Future(), print, print)\n"
            "    except EdgeAsyncError as error: print(error)\n"
            "threading.Thread(target=begin).start()"
        ),
        (
            "cannot start, because the program is ending; let its main thread wait for this thread, for example "
            "with Thread.join\n"
        ),
    ),
    "a wait has an end": (
        (
            "import time\n"
            "from concurrent.futures import Future\n"
            "at_exit.EXIT_S = 0.1\n"
            "at_exit.stop_at_exit(Future(), lambda: print('asked'), print)\n"
            "at_exit.OwnThread('stuck', time.sleep, 60).start()"
        ),
        "asked\n",
    ),
    "what has ended is not stopped": (
        (
            "from concurrent.futures import Future\n"
            "done = Future()\n"
            "at_exit.stop_at_exit(done, lambda: print('asked'), print)\n"
            "done.set_result(None)"
        ),
        "",
    ),
}


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("code", [0, 3])
def test_a_program_ends(name, code):
    text, said = PROGRAMS[name]
    command = [
        sys.executable,
        "-c",
        f"import sys\nfrom edgeasync.host import at_exit\n{text}\nsys.exit({code})",
    ]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=30)
    assert (done.returncode, done.stdout) == (code, said)
    assert ("threads are still running after 0.1 s: stuck" in done.stderr) == (name == "a wait has an end")
