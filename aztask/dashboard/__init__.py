"""The operations page: what a person on call looks at first, in a browser.

Rules
1. A page asks `aztask.operate` and draws; it computes nothing that another view of the same data
   would have to compute again.
2. No value reaches a page unescaped, and none with a secret in it: `aztask.dashboard.render`.
3. Each request passes `aztask.dashboard.guard`: its host, its origin, its visitor. A route that is
   not listed as public needs a visitor.
4. Every page is whole without JavaScript. Scripts only read the page again.
5. A page of one address is asked once in two seconds, however many people look at it.
"""
