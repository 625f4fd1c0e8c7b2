"""The documentation site in a real browser, opened from disk."""

from pathlib import Path

import pytest
from playwright.sync_api import expect

from tests.support.browsers import BROWSER, open_page
from tests.support.jobs import ROOT

mkdocs_config = pytest.importorskip("mkdocs.config")

pytestmark = [
    pytest.mark.system,
    pytest.mark.skipif(BROWSER is None, reason="needs a browser on the PATH: apt-get install chromium"),
]


@pytest.fixture
def site(tmp_path) -> Path:
    """Site of one page, with the theme, the search and the scripts of the documentation."""
    from mkdocs.commands.build import build

    docs, site = tmp_path / "docs", tmp_path / "site"
    docs.mkdir()
    (docs / "index.md").write_text("# Start\n\n## Needles\n\nA sharp needle.\n")
    for path in [*(ROOT / "docs").glob("*.js"), *(ROOT / "docs").glob("*.css")]:
        (docs / path.name).write_bytes(path.read_bytes())
    config = str(ROOT / "mkdocs.yml")
    named = mkdocs_config.load_config(config).user_configs[0]["plugins"]
    plugins = [plugin for plugin in named if isinstance(plugin, str)]  # the others make pages from modules
    build(mkdocs_config.load_config(config, docs_dir=str(docs), site_dir=str(site), nav=["index.md"], plugins=plugins))
    return site


def test_search_works_in_a_site_opened_from_disk_without_network_requests(site):
    with open_page(site / "index.html") as seen:
        seen.page.locator("[data-md-component=search-query]").click()
        seen.page.locator("[data-md-component=search-query]").press_sequentially("needle")
        expect(seen.page.locator(".md-search-result__meta")).to_contain_text("1 matching document")
        assert seen.complaints == []
        assert [url for url in seen.requests if not url.startswith(site.as_uri())] == []
