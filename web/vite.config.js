import { defineConfig } from "vite";

// One script and one style sheet, with no source map and no address of another file: the pages are served with a strict
// Content-Security-Policy, and a report embeds both. The same sources always give the same bytes.
export default defineConfig({
  publicDir: false,
  plugins: [
    {
      name: "colours",
      enforce: "pre",
      // Of the colours of Mantine, only those that the pages use.
      transform: (css, id) =>
        id.includes("default-css-variables.css") &&
        css.replace(/^ *--mantine-color-(pink|grape|violet|indigo|cyan|teal|lime)-[^;]*;\n/gm, ""),
    },
  ],
  oxc: { jsx: { runtime: "automatic", importSource: "@page" } },
  resolve: { alias: { "@page/jsx-runtime": new URL("src/jsx/jsx-runtime.ts", import.meta.url).pathname } },
  define: { "process.env.NODE_ENV": '"production"' },
  build: {
    outDir: "../clawgym/reporting/web",
    emptyOutDir: true,
    target: "es2022",
    sourcemap: false,
    cssCodeSplit: false,
    assetsInlineLimit: 0,
    reportCompressedSize: false,
    lib: { entry: "src/main.tsx", formats: ["iife"], name: "clawgymView", fileName: () => "app.js", cssFileName: "app" },
    // React components say "use client"; that means nothing here.
    rolldownOptions: { onwarn: (warning, warn) => warning.code === "MODULE_LEVEL_DIRECTIVE" || warn(warning) },
  },
});
