"""The security section of the configuration."""

from typing import Annotated

from pydantic import BeforeValidator

from shared.config.values import Section, empty_is_none


class SecurityConfig(Section):
    """Who may connect to the sockets between the processes; see docs/configuration.md."""

    keys: Annotated[str | None, BeforeValidator(empty_is_none)] = None
    internal_network: bool = False
