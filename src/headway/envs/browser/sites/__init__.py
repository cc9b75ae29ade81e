"""The sites that tasks are made of, by name."""

from headway.envs.browser.site import Site
from headway.envs.browser.sites.form import Form
from headway.envs.browser.sites.shop import Shop
from headway.envs.browser.sites.table import Table
from headway.envs.browser.sites.vote import Vote
from headway.envs.browser.sites.wiki import Wiki

SITES: dict[str, type[Site]] = {site.name: site for site in (Form, Shop, Wiki, Table, Vote)}
