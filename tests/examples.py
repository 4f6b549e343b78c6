"""How many examples hypothesis makes: few in the fast tier, which has others each time, else many.

`pytest -m "hypothesis and not slow" --hypothesis-profile many` makes many: `make test-slow`.
"""

from hypothesis import settings

settings.register_profile("few", max_examples=30, deadline=None)
settings.register_profile("many", max_examples=1000, deadline=None)
settings.load_profile("few")  # Of which the command line may make another, before tests are read.


def cheap(count: int) -> settings:
    """At least so many, of a test that takes little time for each."""
    return settings(max_examples=max(count, settings().max_examples))
