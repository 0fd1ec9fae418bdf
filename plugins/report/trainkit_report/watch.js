"use strict"
// Replaces the parts of the page that have changed. A response that is opened stays, and so does a search that is being written.
const status = document.getElementById("status")
let tag = null
async function refresh() {
  const began = performance.now()
  try {
    if (!document.hidden) {
      const answer = await fetch(location.href, { cache: "no-store", headers: tag ? { "If-None-Match": tag } : {} })
      if (answer.status === 200) {
        tag = answer.headers.get("ETag")
        show(new DOMParser().parseFromString(await answer.text(), "text/html"))
      }
      status.textContent = `up to date at ${new Date().toLocaleTimeString()}`
    }
  } catch {
    status.textContent = "the server does not answer; the page is as it was before"
  }
  setTimeout(refresh, Math.max(3000, 10 * (performance.now() - began))) // the page of a long run takes seconds to make
}
function show(page) {
  const parts = page => [...page.querySelectorAll("main > [id]:not(#response, #status)")]
  const [now, then] = [parts(page), parts(document)]
  if (now.map(each => each.id).join() !== then.map(each => each.id).join()) {
    if (!document.getElementById("response")) location.reload()
    return
  }
  now.forEach((part, at) => {
    const old = then[at]
    if (old.innerHTML === part.innerHTML || old.querySelector("form")?.contains(document.activeElement)) return
    const open = [...old.querySelectorAll("details")].map(each => each.open)
    old.replaceChildren(...part.childNodes)
    const fresh = old.querySelectorAll("details")
    if (fresh.length === open.length) fresh.forEach((each, at) => { each.open = open[at] })
  })
}
setTimeout(refresh, 3000)
