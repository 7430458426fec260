package web

import (
	"net"
	"net/http"
	"net/netip"
	"slices"
	"strings"
)

// setHeaders keeps browsers from doing anything with an answer that the page does
// not do.
func setHeaders(header http.Header) {
	header.Set("Content-Security-Policy", "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self';"+
		" base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'")
	header.Set("X-Content-Type-Options", "nosniff")
	header.Set("Referrer-Policy", "no-referrer")
	header.Set("Cross-Origin-Resource-Policy", "same-origin")
	header.Set("Cross-Origin-Opener-Policy", "same-origin")
	header.Set("Cache-Control", "no-store")
}

// refusal says why the request is not answered; "" where it is.
func (h *Handler) refusal(r *http.Request) string {
	if !h.options.AllowRemote && remote(r) {
		return "The page of locks is for clients on this machine only, unless its AllowRemote says otherwise."
	}
	// A site can give its own name the address of this machine. Then the browser
	// takes the page for the site's, but sends the name.
	if !h.hosts(r.Host) {
		return "The page of locks is not to be opened under this name, unless its Hosts list it."
	}
	if site := r.Header.Get("Sec-Fetch-Site"); (site == "cross-site" || site == "same-site") && r.Header.Get("Sec-Fetch-Mode") != "navigate" {
		return "The page of locks is not for other sites."
	}
	return ""
}

// remote reports a client that is not, or not surely, on this machine.
func remote(r *http.Request) bool {
	if r.Header.Get("Forwarded") != "" || r.Header.Get("X-Forwarded-For") != "" {
		return true
	}
	from, err := netip.ParseAddrPort(r.RemoteAddr)
	return err != nil || !from.Addr().Unmap().IsLoopback()
}

// hosts reports a Host header under which the page can be opened.
func (h *Handler) hosts(host string) bool {
	name := strings.Trim(host, "[]") // an IPv6 address without port
	if alone, _, err := net.SplitHostPort(host); err == nil {
		name = alone
	}
	if addr, err := netip.ParseAddr(name); err == nil {
		return h.options.AllowRemote || addr.Unmap().IsLoopback()
	}
	return strings.EqualFold(name, "localhost") ||
		slices.ContainsFunc(h.options.Hosts, func(own string) bool { return strings.EqualFold(own, name) })
}
