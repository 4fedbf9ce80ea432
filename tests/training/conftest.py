from tests.support.run_fixtures import every_save, no_waiting_for_the_disk, nursery, own_home, reference  # noqa: F401
