# The image of manifests/examples/custom-loop.yaml: the worker's, and your scripts.
#
#   tools/images.sh build-one examples diloco-custom-loop:0.1.0 custom-loop.Dockerfile
ARG WORKER=diloco-worker:0.1.0
FROM ${WORKER}
COPY custom_loop.py custom_evaluator.py /workspace/
