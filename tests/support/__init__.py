"""What tests share. Import from the modules: ``from tests.support.worlds import fake_world``."""
