"""What two or more OmniRelay processes need: messages, transport, configuration, errors, logging."""
