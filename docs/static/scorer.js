// How Sphinx's search orders what it finds: the page about what was asked comes before the pages that
// only mention it, and a guide before the reference.
var Scorer = {
  score: ([name, title, anchor, description, score]) => {
    const asked = (new URLSearchParams(location.search).get("q") || "").toLowerCase().split(/\s+/);
    const about = !anchor && asked.every((word) => name.includes(word.replace(/s$/, "")));
    return score + (about ? 30 : 0) + (name.startsWith("how-to/") && !anchor ? 10 : 0);
  },
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};
