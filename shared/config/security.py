"""The section of the configuration that says who may join the stack."""

from typing import Annotated

from pydantic import BeforeValidator

from shared.config.values import Section, empty_is_none


class SecurityConfig(Section):
    """How the sockets between the processes are kept from strangers.

    Attributes:
        keys: Directory of the key files that ``omnirelay keys`` makes: all public ones, and the secret one of
            each process that runs here.  None is no CURVE, which is enough on one machine.
        internal_network: Nobody but the processes of the stack reaches the network that their addresses are
            on; so they may do without keys.
    """

    keys: Annotated[str | None, BeforeValidator(empty_is_none)] = None
    internal_network: bool = False
