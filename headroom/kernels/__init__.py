"""Operations, each with several implementations."""
