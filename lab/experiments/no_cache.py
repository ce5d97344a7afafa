"""The base of controls that train and evaluate. They have no cache, so that they write no text."""
from common.options import UserError


class NoCache:

    def init_cache(self, *sizes):
        raise UserError("this model has no cache to decode with: it trains and evaluates")
