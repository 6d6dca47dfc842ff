"""Moto's object store as a process: `python -m pgwal_pipeline_tests.scenarios.object_store.moto_server PORT`.

A store decides in one step whether a key may be written that must not be there yet; moto looks first and writes then, and between the two
another request of its threads may have written (seen: once in 300 keys on a busy machine). Here requests are taken side by side, and
answered one after the other.
"""

import io
import sys
import threading
from collections.abc import Callable, Iterable
from typing import Any

from moto.moto_server.werkzeug_app import DomainDispatcherApplication, MotoRequestHandler, create_backend_app
from werkzeug.serving import run_simple
from werkzeug.wsgi import get_input_stream

_Application = Callable[[dict[str, Any], Any], Iterable[bytes]]


def one_at_a_time(application: _Application) -> _Application:
    """`application`, called by one thread at a time, each with a request that has come whole."""
    lock = threading.Lock()

    def answer(environment: dict[str, Any], start: Any) -> list[bytes]:
        environment["wsgi.input"] = io.BytesIO(get_input_stream(environment).read())
        with lock:
            return list(application(environment, start))

    return answer


if __name__ == "__main__":
    store = one_at_a_time(DomainDispatcherApplication(create_backend_app))
    run_simple("127.0.0.1", int(sys.argv[1]), store, threaded=True, request_handler=MotoRequestHandler)
