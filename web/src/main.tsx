import "./styles";
import { MantineProvider, createTheme } from "@mantine/core";
import { createRoot } from "react-dom/client";
import { App } from "./app";
import { embedded, listen } from "./data";
import { Routes } from "./router";

const theme = createTheme({ respectReducedMotion: true, cursorType: "pointer", focusRing: "auto", autoContrast: true });

const root = document.getElementById("root");
if (root) {
  if (embedded && !location.hash.startsWith("#/")) history.replaceState(null, "", "#" + embedded.home);
  // The variables are in the style sheet: the page makes no style element, so that its policy needs to allow none.
  createRoot(root).render(
    <MantineProvider theme={theme} defaultColorScheme="auto" withCssVariables={false} withGlobalClasses={false}>
      <Routes>
        <App />
      </Routes>
    </MantineProvider>,
  );
  listen();
}
