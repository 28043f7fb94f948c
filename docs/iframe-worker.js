"use strict";
// The site's search runs in a worker, which browsers do not start for pages that are opened as files. There it runs in a hidden
// frame instead. mkdocs-material's own script for this would be fetched from elsewhere.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      this.frame = Object.assign(document.createElement("iframe"), { hidden: true });
      document.body.append(this.frame);
      const inner = this.frame.contentWindow;
      const load = (source) => new Promise((resolve, reject) => {
        const script = Object.assign(inner.document.createElement("script"), { src: source, onload: resolve, onerror: reject });
        inner.document.body.append(script);
      });
      inner.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      inner.importScripts = (...sources) => sources.reduce((before, source) => before.then(() => load(source)), Promise.resolve());
      this.loaded = load(url);
    }

    postMessage(data) {
      this.loaded.then(() => this.frame.contentWindow.dispatchEvent(new MessageEvent("message", { data })));
    }

    terminate() { this.frame.remove(); }
  };
}
