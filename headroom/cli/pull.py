"""`headroom pull`: download a model into the home folder."""

from headroom.cli.loading import pull_model
from headroom.cli.settings import with_settings
from headroom.options import Options


@with_settings("model", "program")
def pull(options: Options) -> None:
    """Download a model and print its path.

    MODEL is a known name, a Hugging Face repository (ORG/REPO), a file of one (ORG/REPO:FILE.gguf)
    or a local path; left out, it is the default model. A model that is already there is not
    downloaded again.
    """
    print(pull_model(options.model, options.home_path))
