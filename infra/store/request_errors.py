"""Classification of failed requests to an object service: whether sending the same request again may succeed."""

import re
from typing import Final

from obstore.exceptions import BaseError, PermissionDeniedError
from obstore.exceptions import UnauthenticatedError as Unauthenticated

STATUS: Final = re.compile(r"status code: (\d{3})")
"""Pattern that finds the HTTP status in the message of an error."""
CODE: Final = re.compile(r"<Code>(\w+)</Code>")
"""Pattern that finds the error code in the message of an error."""
_PASSING_STATUSES: Final = {408, 409, 429, 500, 502, 503, 504}
_PASSING_CODES: Final = {"RequestTimeout", "RequestTimeTooSkewed", "PriorRequestNotComplete", "SlowDown", "Throttling"}
"""Error codes of S3 for temporary failures with HTTP status 400 or 403. Requests that fail with them are retried, as in
the AWS SDKs."""


class Unsettled(BaseError):
    """Raised when it is unknown whether a request succeeded or its response is complete, so that the request must be
    repeated."""


def may_pass(error: BaseException) -> bool:
    """Return whether a failed request may succeed if it is repeated, for example because the server was busy."""
    if not isinstance(error, BaseError):
        return False
    status, code = STATUS.search(str(error)), CODE.search(str(error))
    if code is not None and code[1] in _PASSING_CODES:
        return True
    if isinstance(error, PermissionDeniedError | Unauthenticated):
        return False
    # An answer to HEAD has no body, so a timeout with status 400 has no code.
    return status is None or int(status[1]) in _PASSING_STATUSES or (status[1] == "400" and code is None)
