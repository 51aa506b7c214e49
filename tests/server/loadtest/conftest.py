from tests.server.loadtest.fake import fake

__all__ = ["fake"]
