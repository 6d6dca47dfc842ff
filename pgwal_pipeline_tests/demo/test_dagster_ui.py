import socket

from pgwal_pipeline.demo.dagster_ui import next_free_port
from pgwal_pipeline.host.spawn import free_port


def test_another_port_is_taken_when_the_wanted_one_is_in_use() -> None:
    taken = free_port()
    with socket.create_server(("127.0.0.1", taken)):
        assert next_free_port(taken) != taken
    assert next_free_port(taken) == taken
