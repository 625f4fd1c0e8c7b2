"""Password of Prefect's server: configured by the user, stored in a Prefect profile, or random for one command."""

import logging
import secrets
import sys
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from prefect.settings.legacy import Setting

logger = logging.getLogger(__name__)

PROFILE: Final = "rheostat"
"""Name of the Prefect profile that contains the address and password of the server that `rheostat server` started
last."""


def configured_password() -> str | None:
    """Return the `NAME:PASSWORD` that the user has configured for Prefect's server or clients, or None."""
    from prefect.settings import PREFECT_API_AUTH_STRING, PREFECT_SERVER_API_AUTH_STRING

    own = PREFECT_SERVER_API_AUTH_STRING.value() or PREFECT_API_AUTH_STRING.value() or None
    return None if own == _read_profile().get(PREFECT_API_AUTH_STRING) else own


def store_password(port: int) -> str:
    """Store the address of the server on this port in the Prefect profile `PROFILE`. Return the password in the
    profile, which is created the first time."""
    from prefect.settings import PREFECT_API_AUTH_STRING, PREFECT_API_URL, get_current_settings, load_profiles
    from prefect.settings.profiles import save_profiles

    stored = _read_profile()
    password = stored.get(PREFECT_API_AUTH_STRING) or create_password()
    settings = {PREFECT_API_URL: f"http://127.0.0.1:{port}/api", PREFECT_API_AUTH_STRING: password}
    if stored != settings:
        profiles = load_profiles()
        profiles.update_profile(PROFILE, settings)
        path = get_current_settings().profiles_path
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch(mode=0o600)
        path.chmod(0o600)  # before the password is written to it
        save_profiles(profiles)
    return password


def read_password(url: str) -> str | None:
    """Return the password stored in the Prefect profile `PROFILE` if the profile belongs to the server with this URL,
    otherwise None."""
    from prefect.settings import PREFECT_API_AUTH_STRING, PREFECT_API_URL

    stored = _read_profile()
    same = url.rstrip("/").replace("//localhost:", "//127.0.0.1:") == stored.get(PREFECT_API_URL)
    return stored.get(PREFECT_API_AUTH_STRING) if same else None


def print_password(password: str) -> None:
    """Print the server's temporary password on the terminal, if the terminal is interactive. The password is never
    written to a log."""
    if sys.stderr.isatty():
        sys.stderr.write(f"password of Prefect's UI: {password}\n")
    else:
        logger.info(
            "Prefect's UI has a random password, which is printed only on a terminal. To log in to the UI, start the "
            "command in a terminal, or set PREFECT_API_AUTH_STRING=NAME:PASSWORD before you start it."
        )


def _read_profile() -> "dict[Setting, str]":
    """Return the settings in the Prefect profile `PROFILE`, or an empty dict if the profile does not exist yet."""
    from prefect.settings import load_profiles

    profiles = load_profiles()
    return profiles[PROFILE].settings if PROFILE in profiles.names else {}


def create_password() -> str:
    """Return new random credentials for Prefect's server, as `NAME:PASSWORD`."""
    return f"rheostat:{secrets.token_urlsafe(24)}"
