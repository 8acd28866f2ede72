"""The types of the parameters that a query may have."""

from typing import Annotated

import msgspec

Number = Annotated[float, msgspec.Meta(ge=-1e300, le=1e300)]
"""A finite number in a query."""
Offset = Annotated[int, msgspec.Meta(ge=0)]
Limit = Annotated[int, msgspec.Meta(ge=1, le=500)]
"""Number of rows on a page."""


class Query(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """Base class of the parameters of a query; itself one without parameters."""
