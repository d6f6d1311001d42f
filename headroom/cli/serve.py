"""`headroom serve`: answer over HTTP."""

from headroom.cli.loading import open_llm
from headroom.cli.settings import with_settings
from headroom.errors import HeadroomError
from headroom.options import Options


@with_settings("model", "engine", "server", "program")
def serve(options: Options) -> None:
    """Serve a model over HTTP, as the OpenAI API does."""
    try:
        # The server's packages are an extra: say so if they are missing.
        from headroom.server.app import bind, run_server
    except ModuleNotFoundError as error:
        raise HeadroomError(
            f"The server needs {error.name}, which is not installed.",
            hint="Install it with: pip install 'headroom[server]'.",
        ) from error
    # Bind first, so that an address in use is reported before minutes of loading, not after.
    with bind(options.host, options.port) as bound, open_llm(options) as llm:
        run_server(llm, options, bound)
