//go:build unix

package tempserver

import (
	"os"
	"strings"
	"testing"
)

// It would start without the plugin: what a test expects of that would fail later, and say
// nothing of the reason.
func TestAServerThatLacksAPluginDoesNotStart(t *testing.T) {
	forEach(t, func(t *testing.T, b Binary) {
		t.Setenv("TMPDIR", t.TempDir())
		for _, option := range []string{
			"--plugin-load-add=no_such_plugin.so",
			"--plugin_load_add=no_such_plugin",
			"--plugin-load=name=no_such_plugin.so",
		} {
			s, err := Start(t.Context(), b, option)
			if err == nil {
				t.Errorf("%s: it starts", option)
				s.Stop()
				continue
			}
			for _, want := range []string{b.String(), "no_such_plugin.so in /", "package m", "scripts/install-servers.sh"} {
				if !strings.Contains(err.Error(), want) {
					t.Errorf("%s: error %q does not say %q", option, err, want)
				}
			}
			wantEmpty(t, os.TempDir())
		}
		start(t, b, "--plugin-dir="+t.TempDir()) // loads nothing
	})
}

// What the installer brings is what the tests load.
func TestPluginsAreThere(t *testing.T) {
	forEach(t, func(t *testing.T, b Binary) {
		plugin := map[Flavour]string{MySQL: "group_replication.so", MariaDB: "metadata_lock_info.so"}[b.Flavour]
		s := start(t, b, "--plugin-load-add="+plugin)
		if got := query(t, s, "SELECT COUNT(*) FROM information_schema.PLUGINS WHERE PLUGIN_LIBRARY = '"+plugin+"'"); got != "1" {
			t.Errorf("%s plugins come from %s, want 1", got, plugin)
		}
	})
}
