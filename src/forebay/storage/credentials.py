"""What a profile of ~/.aws says of S3, as boto3 reads it; obstore knows the environment's keys, web identity and roles.

Source: boto3's guide, "Credentials": keys of the environment come first, then those of the profile, then roles.
"""

import configparser
import os
from pathlib import Path

from forebay.errors import UsageError

_FILES = (("AWS_CONFIG_FILE", "~/.aws/config", "profile "), ("AWS_SHARED_CREDENTIALS_FILE", "~/.aws/credentials", ""))
_OPTIONS = {
    "region": ("region", "AWS_REGION", "AWS_DEFAULT_REGION"),
    "endpoint_url": ("endpoint", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"),
    "aws_access_key_id": ("access_key_id", "AWS_ACCESS_KEY_ID", "AWS_WEB_IDENTITY_TOKEN_FILE"),
    "aws_secret_access_key": ("secret_access_key", "AWS_ACCESS_KEY_ID", "AWS_WEB_IDENTITY_TOKEN_FILE"),
    "aws_session_token": ("token", "AWS_ACCESS_KEY_ID", "AWS_WEB_IDENTITY_TOKEN_FILE"),
}
"""Of a key of a profile obstore's option, and the variables that come before it."""
_UNKNOWN = ("credential_process", "sso_session", "sso_start_url", "role_arn", "login_session")


def profile_options() -> dict[str, str]:
    """Return obstore's options of the profile that AWS_PROFILE names, or of `default`.

    Raises UsageError, without any secret, if it is in no file, or gets its keys from a program that is not run here.
    """
    chosen = os.environ.get("AWS_PROFILE") or os.environ.get("AWS_DEFAULT_PROFILE")
    name, profile = chosen or "default", dict[str, str]()
    for variable, usual, prefix in _FILES:
        path, parser = Path(os.environ.get(variable) or usual).expanduser(), configparser.RawConfigParser(strict=False)
        try:
            parser.read(path, "utf-8")
        except (configparser.Error, UnicodeDecodeError) as error:
            raise UsageError(f"{path}: expected AWS profiles, got {type(error).__name__}. Correct it.") from None
        section = name if name == "default" else prefix + name
        profile |= parser[section] if parser.has_section(section) else {}
    has_keys = any(map(os.environ.get, _OPTIONS["aws_access_key_id"][1:])) or "aws_access_key_id" in profile
    unknown = next((key for key in _UNKNOWN if key in profile), None)
    if not has_keys and (unknown or (chosen and not profile)):
        raise UsageError(
            f"AWS profile {name}: expected its keys in ~/.aws, got {unknown or 'no such profile'}. Set what `aws "
            f"configure export-credentials --profile {name} --format env` prints."
        )
    return {
        option: profile[key]
        for key, (option, *variables) in _OPTIONS.items()
        if key in profile and not any(map(os.environ.get, variables))
    }
