from tests.support.run_fixtures import command_server, every_save, no_waiting_for_the_disk, own_home, reference  # noqa: F401
