package web_test

import (
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"regexp"
	"strings"
	"testing"

	"github.com/mysqllock/mysqllock/inspect/web"
	"github.com/mysqllock/mysqllock/internal/dbtest"
)

func TestOnlyWhoMayLookSeesThePage(t *testing.T) {
	const local, distant = "127.0.0.1:5000", "192.0.2.7:5000"
	tests := []struct {
		name    string
		options web.Options
		from    string
		host    string
		header  string // "Name: value"
		want    int
	}{
		{"local", web.Options{}, local, "localhost:6060", "", 200},
		{"local by address", web.Options{}, local, "127.0.0.1:6060", "", 200},
		{"local without port", web.Options{}, local, "LOCALHOST", "", 200},
		{"local, IPv6", web.Options{}, "[::1]:5000", "[::1]:6060", "", 200},
		{"local, IPv6 without port", web.Options{}, "[::1]:5000", "[::1]", "", 200},
		{"local, IPv4 in IPv6", web.Options{}, "[::ffff:127.0.0.1]:5000", "localhost", "", 200},
		{"remote", web.Options{}, distant, "localhost:6060", "", 403},
		{"remote by its address", web.Options{}, distant, "192.0.2.1:6060", "", 403},
		{"remote in IPv6", web.Options{}, "[2001:db8::1]:5000", "localhost", "", 403},
		{"no address", web.Options{}, "@", "localhost", "", 403},
		{"a name that was given our address", web.Options{}, local, "attacker.example:6060", "", 403},
		{"a name that begins so", web.Options{}, local, "localhost.attacker.example", "", 403},
		{"a name that ends so", web.Options{}, local, "127.0.0.1.attacker.example", "", 403},
		{"no name", web.Options{}, local, "", "", 403},
		{"another address of this machine", web.Options{}, local, "192.0.2.1", "", 403},
		{"through a proxy here", web.Options{}, local, "localhost", "X-Forwarded-For: 192.0.2.7", 403},
		{"through another kind of proxy", web.Options{}, local, "localhost", "Forwarded: for=192.0.2.7", 403},
		{"a name of ours", web.Options{Hosts: []string{"locks.example"}}, local, "Locks.Example:443", "", 200},
		{"a name of ours, remote", web.Options{Hosts: []string{"locks.example"}}, distant, "locks.example", "", 403},
		{"allowed remote", web.Options{AllowRemote: true}, distant, "192.0.2.1:6060", "", 200},
		{"allowed remote, localhost", web.Options{AllowRemote: true}, local, "localhost:6060", "", 200},
		{"allowed remote, another name", web.Options{AllowRemote: true}, distant, "attacker.example", "", 403},
		{"allowed remote, a name of ours", web.Options{AllowRemote: true, Hosts: []string{"locks.example"}}, distant, "locks.example", "", 200},
		{"allowed remote, through a proxy", web.Options{AllowRemote: true}, local, "192.0.2.1", "X-Forwarded-For: 192.0.2.7", 200},
		{"another site", web.Options{}, local, "localhost", "Sec-Fetch-Site: cross-site", 403},
		{"another port", web.Options{}, local, "localhost", "Sec-Fetch-Site: same-site", 403},
		{"its own script", web.Options{}, local, "localhost", "Sec-Fetch-Site: same-origin", 200},
		{"typed into the browser", web.Options{}, local, "localhost", "Sec-Fetch-Site: none", 200},
	}
	for _, test := range tests {
		page := web.New(nowhere(t), test.options)
		defer page.Close()
		for _, path := range []string{"/", "/page.js"} {
			r := httptest.NewRequest(http.MethodGet, path, nil)
			r.RemoteAddr, r.Host = test.from, test.host
			if name, value, found := strings.Cut(test.header, ": "); found {
				r.Header.Set(name, value)
			}
			w := httptest.NewRecorder()
			if page.ServeHTTP(w, r); w.Code != test.want {
				t.Errorf("%s: %s is %d, want %d: %s", test.name, path, w.Code, test.want, w.Body)
			}
		}
	}

	// A link on another site leads to the page, which shows that site nothing.
	page := web.New(nowhere(t), web.Options{})
	defer page.Close()
	r := httptest.NewRequest(http.MethodGet, "/", nil)
	r.RemoteAddr, r.Host = local, "localhost"
	r.Header.Set("Sec-Fetch-Site", "cross-site")
	r.Header.Set("Sec-Fetch-Mode", "navigate")
	w := httptest.NewRecorder()
	if page.ServeHTTP(w, r); w.Code != 200 || !strings.Contains(w.Header().Get("Content-Security-Policy"), "frame-ancestors 'none'") {
		t.Errorf("a link to the page is answered with %d, %v", w.Code, w.Header())
	}
}

func TestThePageFindsItsFilesWhereverItIsMounted(t *testing.T) {
	page := web.New(nowhere(t), web.Options{})
	defer page.Close()
	strip := func(prefix string) http.Handler { return http.StripPrefix(prefix, page) }
	mounts := map[string]http.Handler{
		"/":                page,
		"/debug/locks/":    page,
		"/stripped/":       strip("/stripped"),
		"/stripped/less/":  strip("/stripped/less/"),
		"/without/slash":   page,
		"/stripped/whole":  strip("/stripped/whole"),
		"/mounted/events/": page,
		"/ops/events":      page,
		"/ops/release":     page,
	}
	for at, handler := range mounts {
		mux := http.NewServeMux()
		mux.Handle(at, handler)
		if !strings.HasSuffix(at, "/") { // a router that hands over both
			mux.Handle(at+"/", handler)
		}
		srv := httptest.NewServer(mux)
		srv.Client().Timeout = patience // for a stream in the place of the page
		get := func(url string) (*http.Response, string) {
			t.Helper()
			answer, err := srv.Client().Get(url)
			dbtest.OK(t, err)
			defer answer.Body.Close()
			body, err := io.ReadAll(answer.Body)
			dbtest.OK(t, err)
			return answer, string(body)
		}
		answer, body := get(srv.URL + at + "?x=/y")
		if answer.StatusCode != 200 || !strings.Contains(body, "<title>Locks</title>") || !strings.HasSuffix(answer.Request.URL.Path, "/") {
			t.Errorf("%s: %s at %s: %.100s", at, answer.Status, answer.Request.URL, body)
		}
		for _, m := range regexp.MustCompile(`(?:src|href)="([^"]+)"`).FindAllStringSubmatch(body, -1) {
			url, err := answer.Request.URL.Parse(m[1])
			dbtest.OK(t, err)
			if file, _ := get(url.String()); file.StatusCode != 200 || file.ContentLength == 0 {
				t.Errorf("%s: %s is %s", at, url, file.Status)
			}
		}
		if unknown, _ := get(answer.Request.URL.JoinPath("favicon.ico").String()); unknown.StatusCode != 404 {
			t.Errorf("%s: what there is not is %s", at, unknown.Status)
		}
		srv.Close()
	}
}

// TestAPageIsFoundWithoutARequestURI, where something other than a net/http server hands over the request.
func TestAPageIsFoundWithoutARequestURI(t *testing.T) {
	page := web.New(nowhere(t), web.Options{})
	defer page.Close()
	for path, want := range map[string]int{"/": 200, "/debug/locks/": 200, "/debug/locks": 301, "/page.css": 200, "/favicon.ico": 404} {
		r, err := http.NewRequest(http.MethodGet, "http://localhost"+path+"?x=/y", nil)
		dbtest.OK(t, err)
		r.RemoteAddr = "127.0.0.1:5000"
		w := httptest.NewRecorder()
		if page.ServeHTTP(w, r); w.Code != want || want == 301 && w.Header().Get("Location") != "./locks/" {
			t.Errorf("%s is %d, %v", path, w.Code, w.Header())
		}
	}
}

func TestEachPathAllowsOnlyItsMethod(t *testing.T) {
	_, srv := serve(t, nowhere(t), web.Options{AllowRelease: true})
	for _, test := range [][2]string{
		{http.MethodPost, ""},
		{http.MethodPost, "page.js"},
		{http.MethodHead, "page.events"},
		{http.MethodPost, "page.events"},
		{http.MethodGet, "page.release"},
		{http.MethodOptions, "page.release"},
	} {
		r, err := http.NewRequest(test[0], srv.URL+"/"+test[1], nil)
		dbtest.OK(t, err)
		answer, err := srv.Client().Do(r)
		dbtest.OK(t, err)
		_ = answer.Body.Close()
		if answer.StatusCode != http.StatusMethodNotAllowed || answer.Header.Get("Allow") == "" {
			t.Errorf("%s %q is %s", test[0], test[1], answer.Status)
		}
	}
}

// Nothing in the page runs that the policy would not let run, and nothing takes
// text for HTML. The browser's own word on it is in webtest.
func TestNothingInThePageBreaksItsPolicy(t *testing.T) {
	_, srv := serve(t, nowhere(t), web.Options{})
	answer, err := srv.Client().Get(srv.URL)
	dbtest.OK(t, err)
	_ = answer.Body.Close()
	policy := answer.Header.Get("Content-Security-Policy")
	if !strings.HasPrefix(policy, "default-src 'none';") || strings.Contains(policy, "unsafe") || strings.Contains(policy, "*") {
		t.Errorf("the policy is %s", policy)
	}
	for name, value := range map[string]string{
		"X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer", "Cross-Origin-Resource-Policy": "same-origin", "Cache-Control": "no-store",
	} {
		if got := answer.Header.Get(name); got != value {
			t.Errorf("%s is %q", name, got)
		}
	}
	files, err := os.ReadDir("page")
	dbtest.OK(t, err)
	forbidden := regexp.MustCompile(`innerHTML|outerHTML|insertAdjacent|document\.write|eval\(|DOMParser| style="| on[a-z]+="|@import|url\(|<script>`)
	elsewhere := regexp.MustCompile(`//[a-z0-9.-]+\.[a-z]+`)
	for _, f := range files {
		text, err := os.ReadFile("page/" + f.Name())
		dbtest.OK(t, err)
		rest := strings.ReplaceAll(string(text), "http://www.w3.org/2000/svg", "")
		if m := forbidden.FindString(rest) + elsewhere.FindString(rest); m != "" {
			t.Errorf("%s has %q", f.Name(), m)
		}
	}
}
