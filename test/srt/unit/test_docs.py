"""Pages that are made from the code say what the code says."""

from pathlib import Path

from sglang_pd_radix.patching import registry

DOCS = Path(__file__).parents[3] / "docs"


def test_the_page_of_patches_is_the_register():
    """Written by `pd-radix patches --markdown > docs/patches.md`."""
    page = (DOCS / "patches.md").read_text()
    assert page.strip() == registry.as_markdown(registry.replacements()).strip()
