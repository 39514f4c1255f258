"""Operations that have a faster form on some device, beside the plain torch form that is their oracle."""
